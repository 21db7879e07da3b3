"""Several hosts on one machine: network namespaces joined by a switch, with links as slow as asked
for.
"""
