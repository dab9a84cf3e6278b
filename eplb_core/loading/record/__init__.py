"""The layout record of shared weights: its state, its server and clients, agreement at start-up, following moves."""
