"""Hypothesis profiles: `default` and `ci` replay the same examples every run, `nightly` explores.

`python -m pytest --hypothesis-profile=nightly` selects another one.
"""

from hypothesis import settings

settings.register_profile("default", derandomize=True, deadline=None, print_blob=True)
settings.register_profile("ci", settings.get_profile("default"))
settings.register_profile("nightly", deadline=None, print_blob=True, max_examples=1000)
settings.load_profile("default")
