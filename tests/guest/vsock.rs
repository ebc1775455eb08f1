// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Sockets between a guest and its host: connections from either side, bytes both ways at once, in
//! two lives of one machine and in the next one.

use super::{host::Host, small};

/// Functions for the host's shell. `prepare` makes the guest's initramfs; `run` starts a guest that
/// connects to the host, is connected to, and does what it is told then; `exchange LIFE` is the
/// host's side of it and says the sums of what was sent and what came; `tell WORD` tells it.
const FUNCTIONS: &str = r#"
prepare() {
    cat >/tmp/talk <<'TALK'
my ($how, $cid, $port) = @ARGV;
socket(my $socket, 40, 1, 0) or die "socket: $!\n";
my $address = pack("S S L L x4", 40, 0, $port, $cid);
if ($how eq "listen") {
    bind($socket, $address) or die "bind: $!\n";
    listen($socket, 1) or die "listen: $!\n";
    print STDERR "listening at $port\n";
    accept(my $peer, $socket) or die "accept: $!\n";
    $socket = $peer;
} else {
    connect($socket, $address) or die "connect: $!\n";
}
sub pass {
    my ($from, $to) = @_;
    while (my $count = sysread($from, my $bytes, 65536)) {
        for (my $done = 0; $done < $count;) {
            $done += syswrite($to, $bytes, $count - $done, $done) || die "write: $!\n";
        }
    }
}
my $sender = fork;
if ($sender == 0) { pass(\*STDIN, $socket); shutdown($socket, 1); exit }
pass($socket, \*STDOUT);
waitpid($sender, 0);
exit($? != 0);
TALK
    lay /bin/busybox /usr/bin/perl && cp /tmp/talk /tmp/g/
    modules virtio_mmio vmw_vsock_virtio_transport
    pack <<'INIT'
#!/bin/busybox sh
busybox mount -t devtmpfs dev /dev
exec </dev/null >/dev/console 2>&1
for module in /m/*; do busybox insmod $module; done
busybox dd if=/dev/urandom of=/in bs=1000 count=400 2>/dev/null
sums() { echo "guest sent $(busybox md5sum </in) got $(busybox md5sum </out)"; }
perl /talk connect 2 5000 </in >/out && sums
perl /talk listen 4294967295 6000 </in >/out && sums
word=$(perl /talk listen 4294967295 6001)
echo "told <$word>"
[ "$word" = reboot ] && busybox reboot -f
while :; do busybox sleep 1000; done
INIT
    dd if=/dev/urandom of=/tmp/in bs=1000 count=400 2>/dev/null
}
granule() {
    exec /mnt/granule run --kernel /mnt/vmlinuz --initrd /tmp/small.cpio --memory 96M \
        --memory 64M --cmdline "console=ttyS0 quiet" --user nobody --vsock cid=42 </dev/null
}
listen() {
    perl /tmp/talk listen 4294967295 5000 </tmp/in >/tmp/got 2>/dev/null &
    listener=$!
}
run() {
    : >/tmp/out # What the last one said is not this one's.
    listen
    granule >/tmp/out 2>/tmp/err &
    pid=$!
}
sums() { echo "host sent $(md5sum </tmp/in) got $(md5sum </tmp/got)"; }
until_said() {
    until [ "$(grep -ac "$1" /tmp/out)" -ge $2 ]; do
        kill -0 $pid 2>/dev/null || break; sleep 0.5
    done
}
exchange() {
    until_said 'listening at 6000' $1
    wait $listener && sums
    perl /tmp/talk connect 42 6000 </tmp/in >/tmp/got && sums
    until_said 'listening at 6001' $1
    grep -a 'guest sent' /tmp/out | tail -n 2; cat /tmp/err
}
tell() { echo $1 | perl /tmp/talk connect 42 6001; }
end() { kill $1 $pid; wait $pid; echo "status=$?"; cat /tmp/err; true; }
"#;

/// What each side has sent and got, in the order said.
fn sums<'a>(said: &'a str, side: &str) -> Vec<(&'a str, &'a str)> {
    let start = format!("{side} sent ");
    let rows = said.split(start.as_str()).skip(1);
    rows.map(|row| {
        let mut words = row.split_whitespace().filter(|word| word.len() == 32);
        (words.next().unwrap(), words.next().unwrap())
    })
    .collect()
}

#[test]
#[ignore = "boots an emulated host: minutes"]
fn bytes_pass_both_ways_in_each_life_and_the_address_is_free_afterwards() {
    let mut host = Host::boot();
    small::prepare(&mut host, FUNCTIONS);
    let said = host.run("(granule) 2>&1; echo status=$?");
    assert!(said.contains("modprobe vhost_vsock"), "{said}");
    assert!(said.contains("status=2"), "{said}");
    host.run("modprobe vhost_vsock");

    host.run("run");
    for life in 1..3 {
        let said = host.run(&format!("exchange {life}"));
        let (ours, theirs) = (sums(&said, "host"), sums(&said, "guest"));
        assert_eq!((ours.len(), theirs.len()), (2, 2), "{said}");
        for (ours, theirs) in ours.into_iter().zip(theirs) {
            assert_eq!(ours, (theirs.1, theirs.0), "{said}");
            assert_ne!(ours.0, ours.1, "{said}");
        }
        if life == 1 {
            host.run("listen; tell reboot");
        }
    }

    let said = host.run("(granule) 2>&1; echo status=$?");
    assert!(said.contains("the CID 42 is taken"), "{said}");
    assert!(said.contains("status=2"), "{said}");
    let said = host.run("end -TERM");
    assert!(said.contains("ended by SIGTERM"), "{said}");
    assert!(said.contains("status=0"), "{said}");
    for end in ["-KILL", "-TERM"] {
        host.run("run");
        let said = host.run("exchange 1");
        assert_eq!(sums(&said, "guest").len(), 2, "{said}");
        host.run(&format!("end {end}"));
    }
}
