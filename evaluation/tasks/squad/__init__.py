"""SQuAD: its files, its checks before a server is asked, and its official figures."""
