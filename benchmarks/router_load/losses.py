"""."""
def measure(engines, folder, scale):
    return [], []
