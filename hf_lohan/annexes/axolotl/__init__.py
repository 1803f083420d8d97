"""The plugin of axolotl: a section `lohan:` in the YAML file of a run offloads the run.

axolotl finds the plugin by the entry point group `axolotl.plugins`, so the core has no code for it. It costs nothing if
axolotl is not installed. It replaces the method `load` of axolotl's ModelLoader. Importing this imports axolotl.
"""

from hf_lohan.annexes.axolotl.plugin import AxolotlPlugin
