"""Drafters as other makers publish them: which layout a folder has, and which method runs it."""
