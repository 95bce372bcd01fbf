"""Families of models, one file each: layers, and what files say of them; named in ``registry``. Know no weights."""
