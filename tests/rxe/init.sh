#!/bin/busybox sh
# Starts in the initramfs: loads modules and puts an overlay in memory above the host's file system, which is read-only.
b=/bin/busybox
$b mount -t devtmpfs dev /dev
$b mount -t proc proc /proc
$b mount -t sysfs sys /sys
while read -r name; do $b insmod "/modules/$name" 2>/dev/null; done </modules.order
share=trans=virtio,version=9p2000.L,msize=512000,ro,cache=loose
# Overlays ask for extended attributes that 9p is slow to say no to; older kernels do not know the option.
$b mount -t 9p -o $share,noxattr root /lower || $b mount -t 9p -o $share root /lower
$b mount -t tmpfs -o size=75%,mode=755 upper /upper
$b mkdir /upper/files /upper/work
$b mount -t overlay -o lowerdir=/lower,upperdir=/upper/files,workdir=/upper/work root /new
for folder in dev proc sys; do
  $b mkdir -p /new/$folder
  $b mount -o move /$folder /new/$folder
done
$b mount -t tmpfs -o mode=755 run /new/run
$b mkdir /new/run/epcomm
$b cp /bin/busybox /job/* /new/run/epcomm
exec $b switch_root /new /bin/bash /run/epcomm/guest.sh
