"""DFlash and DSpark: one pass over the target's states fills a block of draft tokens."""
