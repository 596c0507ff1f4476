"""A rented AutoDL-style instance: root in a container, no Docker, no systemd, an odd SSH port.

Copy this file and put in what the console shows (`ssh -p 12345 root@connect.example.com`). The password is
asked for with `--ssh-password-prompt`, never written here. Rented addresses are reused by other machines,
so host keys are kept in a file of their own.
"""

hosts = [
    (
        "autodl",
        {
            "ssh_hostname": "connect.example.com",
            "ssh_port": 12345,
            "ssh_user": "root",
            "ssh_known_hosts_file": "~/.ssh/known_hosts.rackwright-rented",
            "recipe": "deepseek-v4-flash-sm120",
            # the system disk has 30 GB: everything goes to the data disk, weights to the shared one
            "root": "/root/autodl-tmp/rackwright",
            "model_root": "/root/autodl-fs/models",
            "port": 6006,  # the port that the console maps
            "sources": ["modelscope", "huggingface"],
            "index_url": "https://pypi.tuna.tsinghua.edu.cn/simple",
            "hub_endpoint": "https://hf-mirror.com",
            # the provider's own proxy, for GitHub and Hugging Face only; nothing where it is not there
            "proxy_script": "/etc/network_turbo",
        },
    ),
]
