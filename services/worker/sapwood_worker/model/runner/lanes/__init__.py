"""Whether several steps under way in the stages of a pipeline are right, and from how many requests on they pay."""
