"""Load on a server of language models, measured from outside. Knows the server by its API only, and no command line.

Needs the extra ``bench``. :mod:`~sapwood.bench.load` sends what :mod:`~sapwood.bench.data` makes to one of the
:mod:`~sapwood.bench.targets`, and :mod:`~sapwood.bench.measures` summarises the answers.
"""
