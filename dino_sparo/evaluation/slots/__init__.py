"""Single slots and subsets of slots: which ones to use, and what each of them is worth."""
