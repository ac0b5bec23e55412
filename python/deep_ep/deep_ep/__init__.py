"""ferry.deep_ep under the name deep_ep. An import of this module or of its submodules imports Ferry's."""

import ferry.deep_ep

ferry.deep_ep.install()  # puts Ferry's modules in the place of this one
