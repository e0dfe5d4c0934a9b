"""All public methods by name: those of `rs` and `rs.contrib`."""

from tf_redsync.methods.catalogue import methods_in

METHODS = {**methods_in("tf_redsync.methods"), **methods_in("tf_redsync.contrib")}
