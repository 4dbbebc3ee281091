"""The drafter: its configuration, its blocks and masks, and the model itself."""
