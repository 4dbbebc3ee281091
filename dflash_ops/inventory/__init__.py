"""What `inventory.yaml` says: its models and the reader that checks them."""
