"""The input schema of each ratd tool, ``NAME.json``, installed as package ``rat_schemas``."""
