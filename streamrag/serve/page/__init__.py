"""The web page of a service: ask in the browser, and watch passages arrive and the answer grow."""
