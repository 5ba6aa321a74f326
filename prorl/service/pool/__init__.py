"""Model servers: which are able, who gets which, which weights they hold."""
