// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! `granule run`.

mod devices;
mod memory;

use std::{path::PathBuf, time::Instant};

use clap::ValueEnum;
use granule_types::units::Bytes;

use super::{
    CommandResult, Outcome,
    bench::values::{DirtyLog, Switch, size},
};
use granule_vmm::vm::{
    attach::{Devices, DiskConfig, NetConfig, VsockConfig},
    config::{Console, Session, VmConfig},
    privileges::Identity,
    run::{self, Ended},
    terminal,
};

/// Options of `granule run`.
#[derive(Debug, clap::Args)]
#[command(
    after_help = format!(
        "On a terminal every key goes to the guest, Ctrl-C too: {}.\n\nExit code: 0 the guest \
         switched itself off or was ended from outside, 1 it crashed or could not go on, 2 it \
         could not be started as asked.",
        terminal::HELP
    )
)]
pub struct Args {
    /// Linux kernel: Image, Image.gz, or an EFI zboot vmlinuz
    #[arg(long, value_name = "IMAGE")]
    kernel: PathBuf,
    /// Initramfs
    #[arg(long, value_name = "FILE")]
    initrd: Option<PathBuf>,
    /// The kernel's command line; without it console= and the console's name
    #[arg(long, value_name = "TEXT")]
    cmdline: Option<String>,
    /// The guest's serial port
    #[arg(long, value_enum, default_value_t)]
    serial: Port,
    /// Which of the guest's devices the terminal is
    #[arg(long, value_enum, default_value_t)]
    console: Terminal,
    /// How many vCPUs
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
    vcpus: u32,
    /// Memory: SIZE[,backing=BACKING][,prefault=on][,shared=on][,align=SIZE][,host-numa-node=N];
    /// given again, one more zone behind it
    #[arg(long, value_name = "SIZE[,…]", default_value = "512M", value_parser = memory::zone)]
    memory: Vec<granule_vmm::vm::config::Zone>,
    /// Disk: PATH[,readonly=on], a raw image or a block device; given again, one more disk
    #[arg(long, value_name = "PATH[,…]", value_parser = devices::disk)]
    disk: Vec<DiskConfig>,
    /// Network card: tap=NAME[,mac=ADDRESS]; given again, one more card
    #[arg(long, value_name = "tap=NAME[,…]", value_parser = devices::net)]
    net: Vec<NetConfig>,
    /// Sockets between guest and host (AF_VSOCK): cid=N, the guest's address there, 3 or more; the
    /// host's is 2. The host's kernel carries them (vhost_vsock)
    #[arg(long, value_name = "cid=N", value_parser = devices::vsock)]
    vsock: Option<VsockConfig>,
    /// A balloon, by which the guest reports free memory and the host gets it back
    #[arg(long, value_enum, default_value_t = Switch::Off)]
    balloon: Switch,
    /// Width of guest physical addresses; the smallest that fits if left out
    #[arg(long, value_name = "BITS")]
    ipa_bits: Option<u8>,
    /// How dirty pages are logged, where the control socket switches that on
    #[arg(long, value_enum, default_value_t)]
    dirty_log: DirtyLog,
    /// Have the host split blocks ahead, this much at a time, where dirty logging begins or is
    /// cleared: a block size of its stage 2, 2M for one
    #[arg(long, value_name = "SIZE", value_parser = size)]
    eager_split: Option<Bytes>,
    /// End where the guest resets itself, instead of starting it again
    #[arg(long)]
    no_reboot: bool,
    /// Take the guest to be at its init when it says this on its console; without it when it writes
    /// the boot timer
    #[arg(long, value_name = "TEXT")]
    init_text: Option<String>,
    /// Write what each phase of the guest's life cost to this file, one JSON object a life
    #[arg(long, value_name = "FILE")]
    stats: Option<PathBuf>,
    /// Answer HTTP requests on this Unix socket: GET /v1/state, /v1/memory, /v1/counters, /v1/dirty;
    /// POST /v1/memory/collapse, /v1/pause, /v1/resume, /v1/stop, /v1/dirty/start, /v1/dirty/stop, /v1/dirty/clear,
    /// /v1/balloon/SIZE
    #[arg(long, value_name = "SOCKET")]
    api_socket: Option<PathBuf>,
    /// Become this user, by name or number, once everything is open; for a start as root
    #[arg(long, value_name = "USER")]
    user: Option<String>,
    /// And this group; the user's own if left out
    #[arg(long, value_name = "GROUP")]
    group: Option<String>,
    /// Keep this process to the files that are open (Landlock) and the system calls it needs (seccomp)
    #[arg(long, value_enum, default_value_t = Switch::On)]
    sandbox: Switch,
}

/// Which serial port.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum)]
pub enum Port {
    /// ttyS0, which every distribution's kernel has a driver for
    #[default]
    Ns16550a,
    /// ttyAMA0
    Pl011,
}

/// Which device the terminal is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum)]
pub enum Terminal {
    /// The serial port
    #[default]
    Serial,
    /// A virtio console, hvc0, that moves many bytes with one exit; what the guest says on its serial
    /// port is shown too
    Virtio,
}

/// Carries `granule run` out.
///
/// # Errors
/// The machine cannot be had as asked; the error says why.
pub fn run(args: Args) -> CommandResult {
    let started = Instant::now();
    let (console, tty) = match args.serial {
        Port::Ns16550a => (Console::Ns16550a, "ttyS0"),
        Port::Pl011 => (Console::Pl011, "ttyAMA0"),
    };
    let tty = match args.console {
        Terminal::Serial => tty,
        Terminal::Virtio => "hvc0",
    };
    let config = VmConfig {
        kernel: args.kernel,
        initrd: args.initrd,
        command_line: args.cmdline.unwrap_or_else(|| format!("console={tty}")),
        console,
        devices: Devices {
            disks: args.disk,
            nets: args.net,
            vsock: args.vsock,
            balloon: args.balloon == Switch::On,
            console: args.console == Terminal::Virtio,
        },
        vcpus: args.vcpus,
        memory: args.memory,
        ipa_bits: args.ipa_bits,
        eager_split: args.eager_split,
        dirty: args.dirty_log.into(),
    };
    let identity = Identity::find(args.user.as_deref(), args.group.as_deref())?;
    let session = Session {
        started,
        reboot: !args.no_reboot,
        init_text: args.init_text,
        stats: args.stats,
        api_socket: args.api_socket,
        identity,
        sandbox: args.sandbox == Switch::On,
    };
    Ok(match run::run(&config, &session)? {
        Ended::Off | Ended::Reset => Outcome::Done,
        Ended::Stopped(by) => {
            eprintln!("granule: ended by {by}");
            Outcome::Done
        }
        Ended::Failed(why) => {
            eprintln!("granule: {why}");
            Outcome::Failed
        }
    })
}
