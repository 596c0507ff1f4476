"""The manifest of what each host has, compared with its recipe.  pyinfra INVENTORY deploys/manifest.py"""

from pyinfra import host

from tasks.verbs import manifest

manifest(host)
