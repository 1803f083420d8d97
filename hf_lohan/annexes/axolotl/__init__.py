"""The plugin of axolotl: a section `lohan:` in the YAML file of a run offloads the run.

axolotl finds the plugin by the entry point group `axolotl.plugins`, so the core has no seam for it. It costs nothing
where axolotl is not installed. It replaces the `load` of axolotl's ModelLoader. Importing this imports axolotl.
"""

from hf_lohan.annexes.axolotl.plugin import AxolotlPlugin
