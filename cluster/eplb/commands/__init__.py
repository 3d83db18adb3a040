"""The commands of ``headrace eplb``, one module each."""
