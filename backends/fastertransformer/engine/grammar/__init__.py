"""Which tokens may follow in rows whose output must follow a JSON schema, a regular expression or a grammar."""
