"""An HTTP/1.1 server on the event loop that its requests are answered on. llhttp (httptools) parses; a client's next request
is looked at when its last one is answered. Knows nothing of what is served.
"""
