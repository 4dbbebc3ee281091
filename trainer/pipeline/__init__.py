"""How do many devices train one drafter in one process? One thread per device; start at `supervisor.py`."""
