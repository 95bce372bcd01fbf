"""The routing policies, one file each, named in ``routing.factory``. They see views of workers only."""
