#!/bin/bash
# First process on the overlay: makes the nodes, runs the command, tells its status, ends the machine.
#
# A node is a set of namespaces with a virtual Ethernet link to a common bridge and an rxe device on it. Where the
# kernel's rxe knows one network namespace only (split=0), all nodes' links and devices are in that one.
run=/run/epcomm
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
. $run/settings # nodes, split, out, modules, folder
b=$run/busybox

port() {
  local path name
  for path in /sys/class/virtio-ports/*; do
    read -r name <$path/name
    [ "$name" != "$1" ] || echo "/dev/${path##*/}"
  done
}
exec 7>"$(port status)"
end() {
  echo "$*" >&7
  exec $b poweroff -f
}

$b mkdir -p $run/bin $run/fifo /dev/pts /dev/shm
$b mount -t devpts -o mode=620,ptmxmode=666 devpts /dev/pts
$b mount -t tmpfs -o mode=1777 shm /dev/shm
$b ln -sf /proc/self/fd /dev/fd
$b ln -sf fd/0 /dev/stdin
$b ln -sf fd/1 /dev/stdout
$b ln -sf fd/2 /dev/stderr
ulimit -l unlimited
ulimit -c 0
release=$($b uname -r)
$b mkdir -p /lib/modules
$b ln -sfn "$modules/$release" "/lib/modules/$release"
if [ -n "$out" ]; then
  $b mkdir -p "$out"
  $b mount -t 9p -o trans=virtio,version=9p2000.L,msize=512000,cache=none out "$out" || end "fail cannot mount $out"
fi
$b hostname rxe-machine
echo 0 >/proc/sys/net/ipv6/conf/default/accept_dad
[ -d /sys/module/rdma_rxe ] || end "fail rdma_rxe did not load"
if [ "$split" = 1 ]; then
  rdma system set netns exclusive || end "fail this kernel does not split RDMA devices by namespace"
else
  # All addresses are this machine's own, yet packets are to cross the links.
  for pair in accept_local:1 rp_filter:0 arp_ignore:1 arp_announce:2; do
    for at in all default; do echo "${pair#*:}" >"/proc/sys/net/ipv4/conf/$at/${pair%:*}"; done
  done
fi
{
  echo "127.0.0.1 localhost rxe-machine"
  echo "10.77.0.254 bridge"
  for ((i = 0; i < nodes; i++)); do echo "10.77.0.$((i + 1)) node$i"; done
} >/etc/hosts
ip -batch - <<ip_commands || end "fail no bridge"
link set lo up
link add bridge0 mtu 9000 type bridge
addr add 10.77.0.254/24 dev bridge0
link set bridge0 up
ip_commands

apart="-m -u -i"
[ "$split" = 0 ] || apart="$apart -n"
for ((i = 0; i < nodes; i++)); do
  # The process that holds the namespaces says when it has them.
  exec 8< <(exec 7>&-; exec unshare $apart --propagation private $b sh -c "echo \$\$; exec $b sleep 100000000")
  read -r holder <&8 || end "fail node $i did not start"
  in_node="nsenter -t $holder $apart --"
  link=eth0 at=()
  if [ "$split" = 1 ]; then
    ip netns attach node$i $holder || end "fail no network namespace for node $i"
    at=(-n node$i)
  else
    link=eth$i
  fi
  read -r boot_id </proc/sys/kernel/random/uuid
  echo "$boot_id" >$run/boot_id.$i
  $in_node $b sh -c "
    $b hostname node$i
    $b mount -t tmpfs -o mode=1777 shm /dev/shm
    $b mount -o bind $run/boot_id.$i /proc/sys/kernel/random/boot_id
    [ $split = 0 ] || { $b umount -l /sys; $b mount -t sysfs sys /sys; }" || end "fail node $i: mounts"
  ip -batch - <<ip_commands || end "fail node $i: link"
link add up$i mtu 9000 type veth peer name down$i address 02:77:00:00:00:$(printf %02x $((i + 1))) mtu 9000
link set up$i master bridge0 up
link set down$i $([ "$split" = 0 ] || echo netns node$i) name $link
ip_commands
  ip "${at[@]}" -batch - <<ip_commands || end "fail node $i: address"
link set lo up
addr add 10.77.0.$((i + 1))/24 dev $link
link set $link up
ip_commands
  $in_node rdma link add rxe$i type rxe netdev $link || end "fail no rxe$i"
  # It may appear in the first namespace whoever asks for it.
  if [ "$split" = 1 ] && [ -e /sys/class/infiniband/rxe$i ]; then
    rdma dev set rxe$i netns node$i || end "fail rxe$i does not move to its node"
  fi
  cat >$run/bin/node$i <<node
#!/bin/bash
exec nsenter -t $holder $apart -- /bin/bash -c 'cd "\$0" && RXE_NODE=$i RXE_DEVICE=rxe$i RXE_LINK=$link exec "\$@"' "\$PWD" "\$@"
node
  $b chmod 755 $run/bin/node$i
done
# Processors that were held back while the kernel patched itself.
for online in /sys/devices/system/cpu/cpu[1-9]*/online; do
  [ ! -e "$online" ] || [ "$(<"$online")" = 1 ] || echo 1 >"$online"
done

mapfile -d '' -t variables <$run/environment
mapfile -d '' -t command <$run/command
for variable in "${variables[@]}"; do
  case $variable in PATH=*) PATH=${variable#PATH=}:$PATH ;; esac
done
variables+=("PATH=$run/bin:$PATH" "RXE_NODES=$nodes" "RXE_SPLIT=$split" "RXE_OUT=$out")
agent=$(port agent)
[ -z "$agent" ] || variables+=("RXE_AGENT=$agent")
# Through pipes: a port can be opened once only, and programs may open /dev/stdout.
$b mkfifo $run/fifo/out $run/fifo/err
$b cat <$run/fifo/out >"$(port out)" &
out_copier=$!
$b cat <$run/fifo/err >"$(port err)" &
err_copier=$!
echo ready >&7
(
  exec 7>&-
  cd "$folder" || exit 126
  exec setsid env -i "${variables[@]}" "${command[@]}"
) </dev/null >$run/fifo/out 2>$run/fifo/err
status=$?
# What it left behind may still hold the pipes: a moment for the rest, no more.
for ((i = 0; i < 20; i++)); do
  kill -0 $out_copier 2>/dev/null || kill -0 $err_copier 2>/dev/null || break
  $b sleep 0.1
done
cd /
[ -z "$out" ] || $b umount -l "$out"
end "status $status"
