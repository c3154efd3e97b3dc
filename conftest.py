"""For all tests: what they find does not depend on how busy or how set up the machine is."""

from __future__ import annotations

import os

# Servers of the tests' own are reached without the machine's proxy.
for name in ("NO_PROXY", "no_proxy"):
    os.environ[name] = ",".join(filter(None, [os.environ.get(name), "127.0.0.1"]))

try:
    from hypothesis import HealthCheck, settings
except ImportError:  # the static contracts are checked without it
    pass
else:
    settings.register_profile(
        "unhurried",
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],
        # A change is judged by what it does, not by examples that nobody had drawn before; by hand they are random.
        derandomize="SPECSHIM_SAME_EXAMPLES" in os.environ,
    )
    settings.load_profile("unhurried")
