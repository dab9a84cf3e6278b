from hypothesis import settings

# No test depends on how long something takes: first calls compile.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")
