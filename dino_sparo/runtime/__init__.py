"""What keeps a run alive, whatever it trains."""
