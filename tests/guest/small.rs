// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! A guest that is an initramfs and no more, made in the host's shell: busybox, what else it is to
//! run, the kernel's modules, and an init of its own.

use super::host::Host;

/// Functions for the host's shell, in the order in which they are called: `lay PROGRAM…` puts programs
/// and their libraries below `/tmp/g`; `modules NAME…` puts modules there, and those that they need,
/// for `/m/*` to be loaded as they are sorted; `pack` takes `/init` from its input and makes
/// `/tmp/small.cpio`.
const FUNCTIONS: &str = r#"
lay() {
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

/// Has the host's shell know a test's own `functions`, one of which is `prepare`, and prepare with it.
pub fn prepare(host: &mut Host, functions: &str) {
    host.run(FUNCTIONS);
    host.run(functions);
    host.run("prepare");
}
