// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `granule run` with Debian's stock kernel and userland, in an emulated arm64 host that runs the
//! same kernel. A session on the console drives it.
//!
//! It takes minutes, an arm64 `granule` and what `scripts/guest` makes, so it is run by name:
//!
//! ```text
//! scripts/guest
//! cargo build --release --package granule --target aarch64-unknown-linux-musl
//! cargo test --package granule --test guest -- --ignored --nocapture --test-threads=1
//! ```

#![allow(clippy::unwrap_used, reason = "a failed test tells where")]

mod console;
mod expect;
mod host;
mod kill;
mod small;
mod vsock;

use host::Host;

const GUEST: &str = "--kernel /mnt/vmlinuz --initrd /mnt/initrd.img";

/// Logs in and makes the shell easy to read.
fn log_in(host: &mut Host) {
    host.console.expect("login: ");
    host.console.send("root");
    host.console.expect("# ");
    host.console
        .send("stty -echo; bind 'set enable-bracketed-paste off' 2>/dev/null; PS1=");
}

#[test]
#[ignore = "boots an emulated host: minutes"]
fn a_debian_guest_keeps_what_it_writes_and_reaches_its_host() {
    let mut host = Host::boot();
    host.run("ip tuntap add dev tap0 mode tap vnet_hdr");
    host.run("ip addr add 192.168.77.1/24 dev tap0 && ip link set tap0 up");
    host.console.send(&format!(
        "/mnt/granule run {GUEST} --disk /dev/guest --net tap=tap0 --memory 512M \
         --cmdline 'console=ttyS0 root=/dev/vda rw'; echo ended=$?="
    ));

    log_in(&mut host);
    host.run("mount -o remount,rw / && echo kept over a reboot >/kept && sync");
    let card = "card=$(ls /sys/class/net | grep -v lo)";
    host.run(&format!(
        "{card}; ip addr add 192.168.77.2/24 dev $card && ip link set $card up"
    ));
    let pings = host.run("ping -c 3 -W 20 192.168.77.1");
    assert!(pings.contains("3 received"), "{pings}");
    let bulk = host.run("ping -c 2 -W 20 -s 20000 192.168.77.1");
    assert!(bulk.contains("2 received"), "{bulk}");
    host.console.send("reboot -f");

    log_in(&mut host);
    assert!(host.run("cat /kept").contains("kept over a reboot"));
    host.console.send("poweroff -f");
    host.console.expect("ended=0=");
}

#[test]
#[ignore = "boots an emulated host: minutes"]
fn the_readmes_launch_command_works_as_written() {
    let readme = include_str!("../../README.md");
    let start = readme.find("target/release/granule run").unwrap();
    let command = readme[start..].split("\n```").next().unwrap();
    let mut host = Host::boot();
    host.run(
        "cd /tmp && guest=/mnt && ln -s /dev/guest my.img && \
         mkdir -p target/release && ln -s /mnt/granule target/release/",
    );
    host.console.send(&format!("{command}; echo ended=$?="));

    log_in(&mut host);
    let said = host.run("echo cpus=$(nproc).");
    assert!(said.contains("cpus=4."), "{said}");
    host.console.send("poweroff");
    host.console.expect("ended=0=");
}

#[test]
#[ignore = "boots an emulated host: minutes"]
fn beside_guest_memory_the_process_takes_five_mebibytes_at_most() {
    let mut host = Host::boot();
    host.run(
        "ip tuntap add dev tap0 mode tap vnet_hdr; ip link set tap0 up; \
         (sleep 3000 | /mnt/granule run --kernel /mnt/vmlinuz --initrd /mnt/initrd.img \
         --disk /dev/guest --net tap=tap0 --memory 128M \
         --cmdline 'console=ttyS0 root=/dev/vda break=bottom cma=0' >/tmp/out 2>&1) &",
    );
    host.run(
        "until grep -q '(initramfs)' /tmp/out; do \
         sleep 5; tail -n 1 /tmp/out; echo; pidof granule >/dev/null || exit; done",
    );

    // Everything resident, but the one mapping that is as large as the guest's memory.
    let said = host.run(
        "awk '/^[0-9a-f]+-/ { name = $6 } /^Size:/ { size = $2 } \
         /^Rss:/ { if (size != 131072) { sum += $2; if ($2 > 0) print $2, size, name } \
         else guest = $2 } END { print \"guest=\" guest \" others=\" sum \".\" }' \
         /proc/$(pidof granule)/smaps",
    );

    let number = |name: &str| -> u64 {
        let digits = said.split(name).nth(1).unwrap();
        let digits = digits.split(|c: char| !c.is_ascii_digit()).next();
        digits.unwrap().parse().unwrap()
    };
    assert!(number("guest=") > 10 << 10, "the guest has not run: {said}");
    assert!(number("others=") <= 5 << 10, "{said}");
}
