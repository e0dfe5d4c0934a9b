// Preloaded (LD_PRELOAD) into workers that all run on one machine. TensorFlow's server always
// listens on all interfaces, and any process that connects to it can run operations. This library
// binds a port that TF_CONFIG lists as 127.0.0.1:port to 127.0.0.1 only.
#include <arpa/inet.h>
#include <dlfcn.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace {

bool IsListed(in_port_t port) {
  const char* config = std::getenv("TF_CONFIG");
  char address[24];
  std::snprintf(address, sizeof(address), "\"127.0.0.1:%d\"", ntohs(port));
  return config != nullptr && std::strstr(config, address) != nullptr;
}

// Replaces "all addresses" by the loopback address.
void Narrow(sockaddr_in* address) {
  if (address->sin_addr.s_addr != htonl(INADDR_ANY) || !IsListed(address->sin_port)) return;
  address->sin_addr.s_addr = htonl(INADDR_LOOPBACK);
}

void Narrow(int socket, sockaddr_in6* address) {
  const in6_addr& all = in6addr_any;
  if (std::memcmp(&address->sin6_addr, &all, sizeof(all)) || !IsListed(address->sin6_port)) return;
  int only_ipv6 = 0;
  socklen_t size = sizeof(only_ipv6);
  getsockopt(socket, IPPROTO_IPV6, IPV6_V6ONLY, &only_ipv6, &size);
  inet_pton(AF_INET6, only_ipv6 ? "::1" : "::ffff:127.0.0.1", &address->sin6_addr);
}

}  // namespace

extern "C" __attribute__((visibility("default"))) int bind(int socket, const sockaddr* address,
                                                           socklen_t length) noexcept {
  using Bind = int (*)(int, const sockaddr*, socklen_t);
  static const Bind next = reinterpret_cast<Bind>(dlsym(RTLD_NEXT, "bind"));
  union {
    sockaddr_in v4;
    sockaddr_in6 v6;
  } copy;
  if (address == nullptr || length > sizeof(copy)) return next(socket, address, length);
  std::memcpy(&copy, address, length);
  if (address->sa_family == AF_INET && length >= sizeof(copy.v4)) Narrow(&copy.v4);
  if (address->sa_family == AF_INET6 && length >= sizeof(copy.v6)) Narrow(socket, &copy.v6);
  return next(socket, reinterpret_cast<const sockaddr*>(&copy), length);
}
