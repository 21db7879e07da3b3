"""Check a plan: predict settings that the profile has not seen, then measure them."""
