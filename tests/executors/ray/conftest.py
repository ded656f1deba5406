"""Settings of Ray for all tests of this folder, before any of them imports it."""

import os

# Ray reads how to authenticate once per process. Clusters of these tests listen on this machine alone.
os.environ["RAY_AUTH_MODE"] = "disabled"
