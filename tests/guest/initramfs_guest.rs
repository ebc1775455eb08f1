// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A guest with an initramfs only, built in the host's shell: busybox, other programs, kernel modules and
//! an init.

use super::host::Host;

/// Functions of the host's shell, in the order of use: `install_programs PROGRAM…` copies programs and their
/// libraries to `/tmp/g`; `modules NAME…` copies modules and their dependencies to `/m`, whose sort
/// order is the load order; `pack` reads `/init` from its input and builds `/tmp/small.cpio`.
const FUNCTIONS: &str = r#"
install_programs() {
    mkdir -p /tmp/g/bin /tmp/g/dev /tmp/g/proc /tmp/g/m && cp "$@" /tmp/g/bin/
    for lib in $(ldd "$@" | grep -o '/lib[^ ]*'); do
        mkdir -p /tmp/g$(dirname $lib) && cp $lib /tmp/g$lib
    done
}
modules() {
    count=10
    for module in $(modprobe -D -a "$@" | sed -n 's/^insmod //p' | awk '!seen[$0]++'); do
        cp $module /tmp/g/m/$count.ko; count=$((count + 1))
    done
}
pack() {
    cat >/tmp/g/init && chmod 755 /tmp/g/init
    (cd /tmp/g && find . | cpio -o -H newc --quiet) >/tmp/small.cpio
}"#;

/// Defines a test's `functions` in the host's shell and calls `prepare`, which is one of them.
pub fn define_and_prepare(host: &mut Host, functions: &str) {
    host.run(FUNCTIONS);
    host.run(functions);
    host.run("prepare");
}
