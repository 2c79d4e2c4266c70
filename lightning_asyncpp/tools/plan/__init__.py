"""``asyncpp plan``: what a recipe needs on a kind of device, before anything is trained."""
