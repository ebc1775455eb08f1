// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Test of a guest that resets itself: its memory is zero and stays reserved, input of a pipe is
//! not lost, and its vCPUs stay pinned and measured.

use crate::host::EmulatedHost;

/// Kernel image whose console shows `Z` if a word of its memory is zero, or else `D`, and the next byte
/// of its input. It powers off after `q`, and resets after other bytes.
const IMAGE: [u32; 35] = [
    0x1400_0010, // b start; the header of an Image of 1M follows
    0,
    0,
    0,
    0x0010_0000,
    0,
    0xa,
    0,
    0,
    0,
    0,
    0,
    0,
    0,
    0x644d_5241,
    0,
    0xd2a1_2009, // start: mov x9, #0x9000000, the PL011
    0x10ff_ffea, // adr x10, start
    0xd2a0_400b, // mov x11, #0x2000000
    0xf86b_694c, // ldr x12, [x10, x11]
    0x5280_0b40, // mov w0, #'Z'
    0xb400_004c, // cbz x12, 1f
    0x5280_0880, // mov w0, #'D'
    0xb900_0120, // 1: str w0, [x9]
    0xf82b_694a, // str x10, [x10, x11]
    0xb940_1920, // 2: ldr w0, [x9, #0x18]
    0x3727_ffe0, // tbnz w0, #4, 2b: the FIFO is empty
    0xb940_0121, // ldr w1, [x9]
    0xb900_0121, // str w1, [x9]
    0x52b0_8000, // mov w0, #0x84000000
    0x1100_2000, // add w0, w0, #8: SYSTEM_OFF
    0x7101_c43f, // cmp w1, #'q'; b.eq 3f
    0x5400_0040,
    0x1100_0400, // add w0, w0, #1: SYSTEM_RESET
    0xd400_0002, // 3: hvc #0
];

#[test]
#[ignore = "boots an emulated host: minutes"]
fn a_reset_makes_memory_zero_and_keeps_its_pages_and_the_input_of_a_pipe() {
    let mut host = EmulatedHost::boot();
    let words = IMAGE.map(|word| word.to_string()).join(",");
    host.run(&format!("perl -e 'print pack(\"V*\", {words})' >/tmp/image"));
    host.run("truncate -s 1M /tmp/image");
    host.run("mount -t tracefs tracefs /sys/kernel/tracing");
    for backing in ["anonymous", "anonymous_hugetlb", "shared_hugetlb"] {
        // The pool of hugetlb pages has those of the guest only, and then loses what it returns.
        host.run("echo 32 >/proc/sys/vm/nr_hugepages && : >/tmp/out");
        host.run(&format!(
            "{{ until grep -q Z /tmp/out; do sleep 0.1; done; echo 0 >/proc/sys/vm/nr_hugepages
             printf abcq; }} | /mnt/granule run --kernel /tmp/image --serial pl011 \
             --memory 64M,backing={backing} --vcpus 2 --pin 0,0 --fault-stalls sizes \
             --stats /tmp/stats >/tmp/out"
        ));

        let output = host.run("cat /tmp/out; echo .");
        assert!(output.contains("ZaZbZcZq."), "{backing}: {output}");
        let size = if backing == "anonymous" { "4K" } else { "2M" };
        let boots =
            host.run(&format!("grep -c mapped-{size}.count.:[1-9] /tmp/stats; rm /tmp/stats"));
        assert_eq!(boots.trim(), "4", "boots with sizes of faults, {backing}");
    }
    let output = host.run("/mnt/granule run --kernel /tmp/image --pin 0,99 2>&1; echo status=$?");
    assert!(output.contains("--pin") && output.contains("CPU 99 of the host"), "{output}");
    assert!(output.contains("status=2"), "{output}");
}
