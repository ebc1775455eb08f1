// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause
//! Tap interface of the host: a write to it is a packet that the host receives.

use std::{
    fs::{File, OpenOptions},
    io,
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::fs::OpenOptionsExt as _,
    },
    sync::Arc,
};

use vmm_sys_util::ioctl::{ioctl_with_ref, ioctl_with_val};

use super::{super::BackendError, HEADER_SIZE};

/// Open tap; clones share it.
#[derive(Debug, Clone)]
pub struct Tap {
    file: Arc<File>,
    pub(super) name: String,
    /// Indicates that the descriptor accepts `TUNSETOFFLOAD`.
    has_offloads: bool,
}

impl Tap {
    /// Attaches to the tap of this name. If the process has the permission, the kernel creates a
    /// missing tap, which exists until the process ends.
    ///
    /// # Errors
    /// The name is invalid, or the kernel refuses.
    pub fn open(name: &str) -> Result<Self, BackendError> {
        let bytes = name.as_bytes();
        let invalid = |byte: &u8| !byte.is_ascii_graphic() || b"/%".contains(byte);
        if bytes.is_empty() || bytes.len() >= libc::IFNAMSIZ || bytes.iter().any(invalid) {
            let message = format!(
                "'{name}' is not a valid tap name: use 1 to 15 characters without blanks, slashes \
                 and percent signs"
            );
            return Err(BackendError::new(message, None));
        }
        let refused = |operation: &str, source: io::Error| {
            let advice = advice(name, &source);
            BackendError::new(
                format!("the tap {name} cannot be used ({operation}){advice}"),
                source,
            )
        };
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .custom_flags(libc::O_NONBLOCK)
            .open("/dev/net/tun")
            .map_err(|source| refused("opening /dev/net/tun", source))?;
        // SAFETY: all zeros is a valid request: an empty name and no flags.
        let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
        for (target, byte) in request.ifr_name.iter_mut().zip(bytes) {
            *target = libc::c_char::from_ne_bytes([*byte]);
        }
        let flags = libc::IFF_TAP | libc::IFF_NO_PI | libc::IFF_VNET_HDR;
        request.ifr_ifru.ifru_flags = libc::c_short::try_from(flags).unwrap_or(0);
        // SAFETY: the kernel reads a whole `struct ifreq` during the call.
        let result = unsafe { ioctl_with_ref(&file, ioctl_number(libc::TUNSETIFF), &request) };
        check_ioctl(result).map_err(|source| refused("TUNSETIFF", source))?;
        let size = libc::c_int::try_from(HEADER_SIZE).unwrap_or(0);
        // SAFETY: the kernel reads an int during the call.
        let result = unsafe { ioctl_with_ref(&file, ioctl_number(libc::TUNSETVNETHDRSZ), &size) };
        check_ioctl(result).map_err(|source| refused("TUNSETVNETHDRSZ", source))?;
        Ok(Self { file: Arc::new(file), name: name.to_owned(), has_offloads: true })
    }

    /// Uses another non-blocking descriptor as a tap, without offloads. Each read or write
    /// transfers one packet with its header.
    pub fn from_fd(packets: OwnedFd, name: &str) -> Self {
        let file = Arc::new(packets.into());
        Self { file, name: name.to_owned(), has_offloads: false }
    }

    /// Sets the offloads that the guest accepts; the kernel performs all others.
    pub(super) fn set_offloads(&self, flags: libc::c_uint) -> io::Result<()> {
        if !self.has_offloads {
            return Ok(());
        }
        let number = ioctl_number(libc::TUNSETOFFLOAD);
        // SAFETY: the argument is a number.
        check_ioctl(unsafe { ioctl_with_val(&self.file, number, libc::c_ulong::from(flags)) })
    }
}

#[cfg(test)]
impl Tap {
    /// Returns a socket in place of a tap, and its peer in place of the host. The sockets preserve
    /// packet boundaries.
    pub(in crate::devices) fn pair() -> (Self, std::os::unix::net::UnixDatagram) {
        let (tap, host) = std::os::unix::net::UnixDatagram::pair().unwrap();
        tap.set_nonblocking(true).unwrap();
        (Self::from_fd(tap.into(), "a pair"), host)
    }
}

impl AsFd for Tap {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

fn check_ioctl(result: libc::c_int) -> io::Result<()> {
    match result {
        0.. => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Converts an ioctl number, whose type differs between C libraries.
#[allow(clippy::unnecessary_cast, clippy::cast_sign_loss, clippy::cast_possible_truncation)]
const fn ioctl_number(number: libc::Ioctl) -> libc::c_ulong {
    number as u32 as libc::c_ulong
}

fn advice(name: &str, source: &io::Error) -> String {
    match source.raw_os_error() {
        Some(libc::EBUSY) => ": another program uses it".to_owned(),
        Some(libc::EPERM | libc::EACCES) => format!(
            ": create it beforehand as root with 'ip tuntap add dev {name} mode tap vnet_hdr user \
             USER'"
        ),
        Some(libc::EINVAL) => {
            ": it exists and is not a tap with one queue; use another name".to_owned()
        }
        Some(libc::ENOENT | libc::ENODEV) => {
            ": the kernel has no tun driver; try 'modprobe tun'".to_owned()
        }
        _ => String::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn invalid_interface_names_are_refused() {
        for name in ["", "sixteen-bytes-xx", "a b", "a/b", "tap%d", "tap\0"] {
            let error = Tap::open(name).unwrap_err().to_string();
            assert!(error.contains("is not a valid tap name"), "{error}");
        }
    }
}
