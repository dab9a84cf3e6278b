"""The record of what shared weights hold: its keeper, its clients, their agreement."""
