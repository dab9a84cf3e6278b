"""Which slot gets which weights: resolver, checkpoint loader, pull plan, movers, layout record."""
