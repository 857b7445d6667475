"""What a service is spoken to in: each module reads requests and writes events as its protocol has them."""
