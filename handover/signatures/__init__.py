"""Signatures over what the stages make: by OpenSSF Model Signing, as in-toto statements, with a CycloneDX bill.

``model-signing`` computes with keys, certificates and PKCS#11; it is the optional extra ``signing``, imported where a
key is given or a signature is verified. Everything else here is standard library only.
"""
