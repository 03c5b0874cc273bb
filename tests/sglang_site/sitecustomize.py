"""Every Python process of a test inside a SGLang release starts with this: sglang_releases.py puts
this folder and its own on the path."""

import sglang_releases

sglang_releases.install()
