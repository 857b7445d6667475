"""The service's web page, for questions and sessions in the browser."""
