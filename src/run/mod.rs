// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! The subcommand `granule run`.

mod values;

use std::{path::PathBuf, time::Instant};

use clap::ValueEnum;
use granule_types::{
    cpu_list::CpuList,
    units::{Bytes, parse_nonzero_size},
};

use crate::{
    CommandOutcome, CommandResult,
    values::{DirtyLogOption, Switch},
};
use granule_vmm::vm::{
    config::{
        DiskConfig, MemoryZone, NetConfig, ReplacedDevices, RestoreConfig, RunOptions, SerialModel,
        SnapshotConfig, Stage2Prefault, StallDetail, VirtioConfig, VmConfig, VmSource, VsockConfig,
    },
    outcome::VmOutcome,
    privileges::Identity,
    run, terminal,
};

/// Options of the VM that only its snapshot decides after a restore.
const VM_OPTIONS: &[&str] = &[
    "kernel",
    "initrd",
    "cmdline",
    "serial",
    "console",
    "vcpus",
    "memory",
    "prefault",
    "balloon",
    "ipa_bits",
    "dirty_log",
    "eager_split",
    "vm_capability",
];

/// Options of `granule run`.
#[derive(Debug, clap::Args)]
#[command(
    after_help = format!(
        "On a terminal every key goes to the guest, Ctrl-C included: {}.\n\nExit code: 0 the guest \
         powered off or was stopped, 1 it crashed or a vCPU failed, 2 it could not be started.",
        terminal::ESCAPE_KEY_HELP
    )
)]
pub struct Args {
    /// Linux kernel: Image, Image.gz, or an EFI zboot vmlinuz
    #[arg(long, value_name = "IMAGE", required_unless_present = "restore")]
    kernel: Option<PathBuf>,
    /// Initramfs file
    #[arg(long, value_name = "FILE")]
    initrd: Option<PathBuf>,
    /// Kernel command line [default: console= with the name of the console]
    #[arg(long, value_name = "TEXT")]
    cmdline: Option<String>,
    /// Model of the guest's serial port
    #[arg(long, value_enum, default_value_t)]
    serial: SerialOption,
    /// Guest device that is connected to the terminal
    #[arg(long, value_enum, default_value_t)]
    console: ConsoleOption,
    /// Number of vCPUs
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
    vcpus: u32,
    /// Pin the vCPUs to these CPUs (0-3,8), in turn if there are fewer than vCPUs
    #[arg(long, value_name = "CPULIST")]
    pin: Option<CpuList>,
    // Clap would print escapes of the brackets.
    #[allow(rustdoc::broken_intra_doc_links, reason = "not links")]
    /// Memory zone:
    /// SIZE[,backing=BACKING][,prefault=on][,shared=on][,align=SIZE][,host-numa-node=N], with the
    /// backings of `granule bench -s`, such as 4k, thp, 2m and 1g; repeat the option for more zones
    #[arg(long, value_name = "SIZE[,…]", default_value = "512M", value_parser = values::parse_zone)]
    memory: Vec<MemoryZone>,
    /// Populate all memory zones and their stage-2 tables before the guest starts: stage2, or
    /// beside the running guest: stage2,background=on
    #[arg(long, value_name = "stage2[,…]", value_parser = values::parse_prefault)]
    prefault: Option<Stage2Prefault>,
    /// Disk: PATH[,readonly=on], a raw image or a block device; repeat the option for more disks
    #[arg(long, value_name = "PATH[,…]", value_parser = values::parse_disk)]
    disk: Vec<DiskConfig>,
    /// Network card: tap=NAME[,mac=ADDRESS]; repeat the option for more cards
    #[arg(long, value_name = "tap=NAME[,…]", value_parser = values::parse_net)]
    net: Vec<NetConfig>,
    /// Vsock device (AF_VSOCK): cid=N, the guest's context ID, at least 3; the host's is 2. The
    /// host needs the vhost_vsock module
    #[arg(long, value_name = "cid=N", value_parser = values::parse_vsock)]
    vsock: Option<VsockConfig>,
    /// Balloon device, through which the guest returns free memory to the host
    #[arg(long, value_enum, default_value_t = Switch::Off)]
    balloon: Switch,
    /// Width of guest-physical addresses in bits [default: the smallest that fits]
    #[arg(long, value_name = "BITS")]
    ipa_bits: Option<u8>,
    /// Mode of dirty logging, which the control socket starts and stops
    #[arg(long, value_enum, default_value_t)]
    dirty_log: DirtyLogOption,
    /// Chunk size of eager page splitting when dirty logging starts or the log is cleared: a block
    /// size of the host's stage 2, for example 2M
    #[arg(long, value_name = "SIZE", value_parser = parse_nonzero_size)]
    eager_split: Option<Bytes>,
    /// Enable this capability of the VM, by its number, on a host kernel whose patches define it
    #[arg(long, value_name = "NUMBER")]
    vm_capability: Vec<u32>,
    /// Exit instead of rebooting when the guest resets itself
    #[arg(long)]
    no_reboot: bool,
    /// Text on the guest's console that marks the start of its init; by default a write to the boot
    /// timer marks it
    #[arg(long, value_name = "TEXT")]
    init_text: Option<String>,
    /// Write statistics of each phase to this file, one JSON object for each boot: the first 99 boots
    /// and the last one
    #[arg(long, value_name = "FILE")]
    stats: Option<PathBuf>,
    /// Measure the time of vCPUs in stage-2 faults, for the statistics and the control socket;
    /// requires root. The kernel records each fault and each entry into the guest
    #[arg(long, value_enum, default_value_t)]
    fault_stalls: FaultStallsOption,
    /// Serve HTTP requests on this Unix socket: GET /v1/state, /v1/memory, /v1/counters, /v1/dirty,
    /// /metrics; POST /v1/memory/collapse, /v1/pause, /v1/resume, /v1/stop, /v1/dirty/start,
    /// /v1/dirty/stop, /v1/dirty/clear, /v1/balloon/SIZE, /v1/snapshot, /v1/snapshot/live
    #[arg(long, value_name = "SOCKET")]
    api_socket: Option<PathBuf>,
    // Clap would print escapes of the brackets.
    #[allow(rustdoc::broken_intra_doc_links, reason = "not links")]
    /// Directory for snapshots of the VM, which POST /v1/snapshot of the control socket takes:
    /// DIR[,incremental=on]; it is created if it does not exist. With incremental=on, snapshots after
    /// the first one write only the pages that changed since the last one
    #[arg(
        long,
        value_name = "DIR[,…]",
        requires = "api_socket",
        value_parser = values::parse_snapshot
    )]
    snapshot: Option<SnapshotConfig>,
    // Clap would print escapes of the brackets.
    #[allow(rustdoc::broken_intra_doc_links, reason = "not links")]
    /// Continue the VM of a snapshot: DIR[,memory=copy|map|userfaultfd][,order=FILE][,paused=on].
    /// Memory is copied before the guest runs; mapped from the file, base pages only; or copied when
    /// it is accessed, which FILE records for the next time. With paused=on the guest runs after
    /// POST /v1/resume. Options of the VM are those of the snapshot, except that
    /// --disk, --net and --vsock replace its devices. With --user, that user opens the disks and taps
    /// that the snapshot names
    #[arg(
        long,
        value_name = "DIR[,…]",
        value_parser = values::parse_restore,
        conflicts_with_all = VM_OPTIONS
    )]
    restore: Option<RestoreConfig>,
    /// Change to this user (name or number) after all files are open; requires root
    #[arg(long, value_name = "USER")]
    user: Option<String>,
    /// Change to this group [default: the user's own]
    #[arg(long, value_name = "GROUP")]
    group: Option<String>,
    /// Confine the process to its open files (Landlock) and the system calls that it needs
    /// (seccomp)
    #[arg(long, value_enum, default_value_t = Switch::On)]
    sandbox: Switch,
}

/// Model of the serial port.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum)]
pub enum SerialOption {
    /// ttyS0, supported by the kernel of every distribution
    #[default]
    Ns16550a,
    /// ttyAMA0
    Pl011,
}

/// Device that is connected to the terminal.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum)]
pub enum ConsoleOption {
    /// The serial port
    #[default]
    Serial,
    /// A virtio console, hvc0, which transfers many bytes with one exit; the output of the serial
    /// port is shown too
    Virtio,
}

/// Measurement of stalls in stage-2 faults.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum)]
pub enum FaultStallsOption {
    /// Measure them by type and level
    On,
    /// Measure them also by the size that the kernel maps, with a probe that stays in the
    /// kernel; requires CONFIG_KPROBE_EVENTS
    Sizes,
    /// Measure none
    #[default]
    Off,
}

impl From<FaultStallsOption> for Option<StallDetail> {
    fn from(option: FaultStallsOption) -> Self {
        match option {
            FaultStallsOption::On => Some(StallDetail::Levels),
            FaultStallsOption::Sizes => Some(StallDetail::Sizes),
            FaultStallsOption::Off => None,
        }
    }
}

/// Runs `granule run`.
pub fn run(args: Args) -> CommandResult {
    let identity = Identity::find(args.user.as_deref(), args.group.as_deref())?;
    let options = RunOptions {
        start_time: Instant::now(),
        reboots_on_reset: !args.no_reboot,
        init_text: args.init_text.clone(),
        fault_stalls: args.fault_stalls.into(),
        stats: args.stats.clone(),
        api_socket: args.api_socket.clone(),
        snapshots: args.snapshot.clone(),
        identity,
        vcpu_cpus: args.pin.clone(),
        is_sandboxed: args.sandbox == Switch::On,
    };
    let source = match &args.restore {
        Some(restore) => VmSource::Restore(RestoreConfig {
            devices: ReplacedDevices {
                disks: absolute_paths(args.disk),
                nets: args.net,
                vsock: args.vsock,
            },
            ..restore.clone()
        }),
        None => VmSource::Boot(Box::new(vm_config(args))),
    };
    Ok(match run::run(&source, &options)? {
        VmOutcome::PowerOff | VmOutcome::Reset => CommandOutcome::Done,
        VmOutcome::Stopped(by) => {
            eprintln!("granule: stopped by {by}");
            CommandOutcome::Done
        }
        VmOutcome::Failed(reason) => {
            eprintln!("granule: {reason}");
            CommandOutcome::Failed
        }
    })
}

/// A snapshot names the disks for restores in other directories.
fn absolute_paths(disks: Vec<DiskConfig>) -> Vec<DiskConfig> {
    let absolute = |path: PathBuf| std::path::absolute(&path).unwrap_or(path);
    disks.into_iter().map(|disk| DiskConfig { path: absolute(disk.path), ..disk }).collect()
}

fn vm_config(args: Args) -> VmConfig {
    let (serial, serial_name) = match args.serial {
        SerialOption::Ns16550a => (SerialModel::Ns16550a, "ttyS0"),
        SerialOption::Pl011 => (SerialModel::Pl011, "ttyAMA0"),
    };
    let console = match args.console {
        ConsoleOption::Serial => serial_name,
        ConsoleOption::Virtio => "hvc0",
    };
    let populates_zones = args.prefault == Some(Stage2Prefault::BeforeStart);
    let with_prefault =
        |zone: MemoryZone| MemoryZone { prefault: zone.prefault || populates_zones, ..zone };
    VmConfig {
        // Without a kernel, a snapshot is restored.
        kernel: args.kernel.unwrap_or_default(),
        initrd: args.initrd,
        command_line: args.cmdline.unwrap_or_else(|| format!("console={console}")),
        serial,
        devices: VirtioConfig {
            disks: absolute_paths(args.disk),
            nets: args.net,
            vsock: args.vsock,
            has_balloon: args.balloon == Switch::On,
            has_console: args.console == ConsoleOption::Virtio,
        },
        vcpus: args.vcpus,
        memory: args.memory.into_iter().map(with_prefault).collect(),
        stage2_prefault: args.prefault,
        ipa_bits: args.ipa_bits,
        eager_split: args.eager_split,
        vm_capabilities: args.vm_capability,
        dirty_log: args.dirty_log.into(),
    }
}
