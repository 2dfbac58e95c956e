"""The area's fixtures; their helpers are imported by name from kv_pairs, since every area has a conftest."""

from kv_pairs import kind, local_ray, make_pair, short_dir

__all__ = ["kind", "local_ray", "make_pair", "short_dir"]
