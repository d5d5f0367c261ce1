"""Where models look for kernels: one module a library, none imported before it is used."""
