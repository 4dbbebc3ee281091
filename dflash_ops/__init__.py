"""Launch, watch and control DFlash training runs inside an LXC container. Imports no torch."""
