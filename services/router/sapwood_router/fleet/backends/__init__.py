"""Workers that are asked over HTTP: whether they are well. Know neither clients nor queues."""
