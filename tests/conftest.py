"""What all tests share."""

import os

from hypothesis import settings

# A busy machine must not fail a property by its clock, and a check of a change must not depend on luck.
settings.register_profile("project", deadline=None, derandomize="CI" in os.environ)
settings.load_profile("project")
