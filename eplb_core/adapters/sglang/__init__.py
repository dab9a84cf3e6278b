"""SGLang: its plug-in, maps, moves, rebalancing and weight cache."""
