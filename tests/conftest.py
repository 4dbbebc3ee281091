"""What every test may count on."""

from __future__ import annotations

import signal

# A shell starts what it puts into the background with SIGINT ignored, and every program started from there inherits
# that: Ctrl-C could then not be tried at all.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
